"""What came of runs and predictions, on the page: runs beside each other, predictions beside what is true."""
