"""Reports of runs side by side, as one HTML page with plots."""
