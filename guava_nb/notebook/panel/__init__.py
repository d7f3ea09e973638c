"""The live panel of a blocking cell, and the ways it is drawn. Knows views and the page; knows no session."""
