"""Workers that this side brings into its session: those that it dials, and those that it has started on other machines."""
