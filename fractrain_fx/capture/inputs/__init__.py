"""What a model is called with: its wrappers taken off, example inputs found, arguments made placeholders."""
