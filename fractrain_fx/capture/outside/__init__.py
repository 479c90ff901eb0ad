"""Effects of a run outside torch: attributes that it reads and changes, random numbers of other libraries."""
