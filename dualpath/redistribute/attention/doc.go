// Package attention has the arithmetic that makes routed attention exact: it merges partial results
// over disjoint parts of a cache with the statistics of online softmax (Milakov and Gimelshein,
// arXiv 1805.02867; "Move the Query, Not the Cache", arXiv 2606.01502, sections 3.2 and 3.3).
//
//	holder i, its part S_i of the tokens           requester
//	m_i = max over S_i of the logits x_j     ┐
//	ℓ_i = Σ exp(x_j − m_i)                   ├──►  m = max m_i
//	o_i = Σ exp(x_j − m_i) v_j / ℓ_i         ┘     w_i = ℓ_i exp(m_i − m),  ℓ = Σ w_i
//	                                               o = Σ (w_i/ℓ) o_i
//
//	a row on the wire, little endian: o (bfloat16, width) │ m (float32) │ ℓ (float32)
//
// The result of the merge is softmax attention over the whole cache: the same terms are added in
// another order. So the merge is commutative and, up to rounding, associative, and a part without
// tokens (ℓ = 0) changes nothing. No exponent exceeds 0, so no exponential overflows.
//
// The engines' kernels compute the partial results on accelerators. Absorbed is a slow reference
// implementation of absorbed multi-head latent attention, for tests and emulation. The package has
// no goroutines and no state, and a merge allocates nothing.
package attention
