"""Does it work on any model? Every architecture of timm, Hugging Face and torchvision, put through the same checks."""
