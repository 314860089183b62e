"""The HTTP side without a framework: the key, the fingerprint, the decision, the stored response, the problem."""
