"""The experiments of ``nsys-analyze bench``, one package each; ``registry`` lists them."""
