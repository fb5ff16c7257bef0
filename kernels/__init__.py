"""Mathematical operators: tensors in, tensors out. Knows no service, frontier or proto."""
