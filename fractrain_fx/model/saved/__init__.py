"""A rewritten model on disk and on the Hub: its folder, the card in it, uploads and downloads."""
