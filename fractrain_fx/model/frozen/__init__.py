"""Parameters that are not trained: costs without their gradients, and weights as codes."""
