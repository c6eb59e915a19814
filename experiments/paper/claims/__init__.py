"""Claims of the paper, judged from results/: quality, cost and heads.

A new claim is a function here that returns verdicts, a rule in rules.md and verdicts.py if it needs one, and a text in
evidence_page.py with its marker in docs/evidence.md.
"""
