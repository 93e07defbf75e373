"""The experiments of ``nsys-analyze bench``, one module each; ``benches`` lists and runs them."""
