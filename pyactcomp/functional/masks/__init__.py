"""ReLU and dropout, which store one bit an element."""
