"""The experiments of ``nsys-analyze bench``, one module each; ``results`` lists them."""
