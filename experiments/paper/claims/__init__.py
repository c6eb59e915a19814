"""Claims of the paper, judged from results/: quality, cost and heads.

To add a claim, write a function here that returns verdicts, a rule in rules.md and verdicts.py if needed, and a text
in evidence_page.py with its marker in docs/evidence.md or a page of docs/evidence/.
"""
