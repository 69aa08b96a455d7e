"""Make a step fit: move tensors to the host or compute them again.

`problem` lays the step out, `search` chooses within a budget of memory, `plan` is the result.
"""
