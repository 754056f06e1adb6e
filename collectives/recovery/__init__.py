"""Recovery: a new membership, a new plan and a new back end after failures, joins and slow links."""
