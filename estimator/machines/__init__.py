"""What was measured of machines: profiles as files, compared; typical values."""
