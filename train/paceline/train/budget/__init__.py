"""Training drafters that keep guessing well when their KV budget changes (BudgetDraft)."""
