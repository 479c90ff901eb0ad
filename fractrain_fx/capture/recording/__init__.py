"""One real run, written down call by call, and what stays one node in it."""
