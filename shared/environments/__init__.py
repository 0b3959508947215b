"""verifiers environments: loading, rollouts through our client, wire state, scoring."""
