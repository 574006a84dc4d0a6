"""Constraints on the tokens of a choice: allowed ids, bad words, a thinking budget, a grammar.

Each says which tokens may come next, as a function of the ids that the choice has generated.
"""
