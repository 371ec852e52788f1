package dualpath

// ordered is a heap. Each item stores its index in the heap, so that the item can be moved when its
// rank changes.
type ordered[T any] struct {
	items []*T
	less  func(a, b *T) bool
	// index returns a pointer to the field in which an item stores its index, counted from 1. 0:
	// the item is not in the heap.
	index func(*T) *int
}

// first returns the first item, or nil.
func (q *ordered[T]) first() *T {
	if len(q.items) == 0 {
		return nil
	}
	return q.items[0]
}

// put adds an item, or moves an item in the heap whose rank has changed.
func (q *ordered[T]) put(x *T) {
	if *q.index(x) == 0 {
		q.items = append(q.items, x)
		*q.index(x) = len(q.items)
	}
	q.fix(*q.index(x) - 1)
}

// remove removes an item, if it is in the heap.
func (q *ordered[T]) remove(x *T) {
	i := *q.index(x) - 1
	if i < 0 {
		return
	}
	last := len(q.items) - 1
	q.swap(i, last)
	q.items[last] = nil
	q.items = q.items[:last]
	*q.index(x) = 0
	if i < last {
		q.fix(i)
	}
}

// swap exchanges two items.
func (q *ordered[T]) swap(i, j int) {
	q.items[i], q.items[j] = q.items[j], q.items[i]
	*q.index(q.items[i]), *q.index(q.items[j]) = i+1, j+1
}

// fix restores the order around index i.
func (q *ordered[T]) fix(i int) {
	for i > 0 && q.less(q.items[i], q.items[(i-1)/2]) {
		q.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, c := range [...]int{2*i + 1, 2*i + 2} {
			if c < len(q.items) && q.less(q.items[c], q.items[least]) {
				least = c
			}
		}
		if least == i {
			return
		}
		q.swap(i, least)
		i = least
	}
}
