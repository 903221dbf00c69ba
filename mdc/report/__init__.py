"""What a finished run shows: one HTML page, and the tables on the terminal."""
