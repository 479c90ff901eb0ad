"""Which trained precisions leave for which libraries, and how far their outputs are from evaluation here."""
