"""What is judged on testbeds: one module a subject, each with its cases, bench and report."""
