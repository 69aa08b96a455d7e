"""Answer over HTTP: estimates, tables, plans and observations of graphs that were uploaded.

`app` has the endpoints, `guard` lets in, `questions` are checked, `answers` answer, `graphs` keeps
uploads, `pages` are for browsers.
"""
