"""What a check of a step is about, and what it came to, in words. Asks no worker."""
