"""Chat templates that want for ever, or more memory than there is, in one step that no sandbox
within the process can interrupt."""

DOUBLED = (
    "{% set n = namespace(a=[0], b=[0]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
ENDLESS = {
    "comparison": DOUBLED + "{{ n.a == n.b }}",
    "in": DOUBLED + "{{ n.a in [n.b] }}",
    "str": DOUBLED + "{{ n.a | string | length }}",
    "tojson": DOUBLED + "{{ n.a | tojson | length }}",
    "hash": DOUBLED.replace("[n.a, n.a]", "(n.a, 1)").replace("[0]", "1").replace("60", "99999")
    + "{% for i in range(99999) %}{{ {n.a: 1} | length }}{% endfor %}",
    "unique": DOUBLED.replace("[n.a, n.a]", "(n.a, n.a)")
    .replace("[n.b, n.b]", "(n.b, n.b)")
    .replace("[0]", "1")
    + "{{ [n.a, n.b] | unique | list | length }}",
    "count": DOUBLED + "{{ [n.a].count(n.b) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 999999999 }}",
}
HUGE = {
    "sum": "{{ ([[0] * 9999999] * 99) | sum(start=[]) }}",
    "percent": "{{ '%(a)1500000000s' % {'a': 1} }}",
    "indent": "{{ 'a\n' * 9999 | indent('b' * 999999) }}",
    "tojson": "{{ [0] * 99999 | tojson(indent='a' * 99999) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "lists": "{% set n = namespace(k=[]) %}{% for i in range(200) %}"
    "{% set n.k = [[0] * 9999999, n.k] %}{% endfor %}",
    "times": "{{ 'a' * 1000000000 }}",
}
