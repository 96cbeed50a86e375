"""Four domains in one run: sums, questions over documents, programs, and bookings with tools."""
