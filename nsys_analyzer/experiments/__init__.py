"""The experiments of ``nsys-analyze bench``, one module each; ``registry`` lists them."""
