"""Files that a run leaves: written so that they last, read so that damage is found."""
