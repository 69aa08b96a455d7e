"""Pictures of answers; needs the extra [report]."""
