"""Answer over HTTP: estimates, tables, plans and observations of graphs that were uploaded.

`app` has the endpoints and pages, `guard` lets in, `answers` checks questions, keeps uploads and
answers.
"""
