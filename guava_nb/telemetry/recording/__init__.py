"""What a GPU's sensors said during some minutes, kept in a file and played again where there is no such GPU."""
