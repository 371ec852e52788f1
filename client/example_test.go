package client_test

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// An engine finds the cached prefix of a prompt, loads it into its own pages,
// computes the rest and stores what is new.
func Example() {
	ctx := context.Background()
	engine, err := tcp.New(ctx, tcp.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer engine.Close()
	store, err := client.Open(ctx, client.Options{Servers: []string{"127.0.0.1:7420"}, Engine: engine})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ns, err := store.Namespace(ctx, "llama-3/70b")
	if err != nil {
		fmt.Println(err)
		return
	}
	pages, err := store.Register(make([]byte, 512*ns.Geometry.BlockBytes()))
	if err != nil {
		fmt.Println(err)
		return
	}
	prompt := make([]kv.Token, 512*ns.Geometry.BlockTokens)

	m, err := store.Match(ctx, client.MatchRequest{Namespace: ns, Tokens: prompt, Lease: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	var r client.ReadResult
	if m.Outcome == client.Hit {
		r, err = store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: m.IDs, Epoch: m.Epoch, Into: pages})
		if err != nil {
			fmt.Println(err)
			return
		}
	}
	// … compute the blocks from r.Blocks on, into the pages behind it …
	w, err := store.Write(ctx, client.WriteRequest{
		Namespace: ns, Tokens: prompt, First: r.Blocks, Epoch: ns.Epoch,
		From: pages, Base: int64(r.Blocks) * ns.Geometry.BlockBytes(),
	})
	fmt.Println(w.Outcome, w.Stored, err)
}
