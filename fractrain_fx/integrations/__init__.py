"""Training loops of other libraries: Hugging Face's Trainer, Lightning, timm. Import the one that you need."""
