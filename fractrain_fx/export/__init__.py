"""The trained low precision outside training: a plain module, and files that other libraries load."""
