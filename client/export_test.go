package client

import "context"

// ConnectLocal makes n connections to the unix socket of each node that reports one.
func (s *Store) ConnectLocal(ctx context.Context, n int) error {
	for _, node := range s.nodes {
		sess, err := node.live(ctx)
		if err != nil {
			return err
		}
		_, _ = node.local.take(sess) // makes one more, in the background
		for range n {
			c, err := node.local.connect(ctx, node.local.path(sess), sess.localID)
			if err != nil {
				return err
			}
			node.local.put(c, true)
		}
	}
	return nil
}
