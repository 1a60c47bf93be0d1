"""What is made from the product for its documentation."""
