"""The method ``selfspec``: the target drafts for itself with sparse attention."""
