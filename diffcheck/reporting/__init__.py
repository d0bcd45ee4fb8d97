"""Reports: the JSON document of a run, and everything that is made from that document alone.

`document` is the only module here that knows a run. The others read nothing but the document, so a page or a summary
can be made as well from a JSON file that was kept (`diffcheck render`): `console` the table on a terminal, `markdown` a
summary for a pull request, `html` one page for people, `junit` for CI, `prometheus` for monitoring. `words` puts a run
into sentences for all of them, and `schema` says what each command's JSON holds.
"""
