"""The experiments of ``nsys-analyze bench``, one in each module. The module ``benches`` lists and runs them."""
