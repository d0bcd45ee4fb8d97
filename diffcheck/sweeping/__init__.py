"""From one comparison to the best format for the bytes: a space of recipes, measured on layers and texts.

A *case* is one recipe on some query rows of one layer and one text; it depends on nothing else (`cases`). A space says
which recipes there are (`space`). In each layer all of them are measured on a few rows, the better ones on more
(`halving`), by an executor that decides only where a case runs (`executors`). Records are per row, so that everything
that is reported (`ranking`: intervals, paired differences, probability of being best, Pareto front, mixed formats) is
computed at the end from the same numbers, whoever measured them.
"""
