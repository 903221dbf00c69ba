"""Side-by-side benchmarks of training and loading, against libraries that do the same work. `make bench` runs them."""
