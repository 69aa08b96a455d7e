"""Questions that people ask, answered by asking for estimates."""
