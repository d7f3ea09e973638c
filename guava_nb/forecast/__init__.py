"""What a run will send and receive, estimated before it begins. Knows the records of a run; sends nothing."""
