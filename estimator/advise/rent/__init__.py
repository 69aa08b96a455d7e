"""What to rent: `offers` with their cost and time, on machines that come and go (`transient`)."""
