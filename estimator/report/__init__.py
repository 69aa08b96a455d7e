"""Describe answers to people; pictures need the extra [report].

`facts` has the words; `sections`, `plans`, `profiles` the sections that a terminal, a
page and a notebook render alike; `page` writes HTML, `pictures` draws.
"""
