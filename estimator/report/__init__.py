"""Show answers to people; pictures need the extra [report].

`facts` says them in words, `sections` gathers them, `page` writes HTML, `pictures` draws.
"""
