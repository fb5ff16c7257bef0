"""The verifier: target model, its state, and every token that is published."""
