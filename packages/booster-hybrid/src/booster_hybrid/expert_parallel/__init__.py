"""Expert parallelism: the experts of a layer spread over ranks, which send each other the tokens that choose them."""
