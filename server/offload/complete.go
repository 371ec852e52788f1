package offload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/penstock-kv/penstock/kv"
)

// complete makes the remote engines prefill a prompt: it requests a completion of one token and
// drops the output.
func (f *Offload) complete(ctx context.Context, tokens []kv.Token) error {
	model, err := f.modelName(ctx)
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string]any{"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "stream": false})
	if err != nil {
		return err
	}
	return f.call(ctx, http.MethodPost, "v1/completions", body, nil)
}

// modelName returns the name of the model at the URL.
func (f *Offload) modelName(ctx context.Context) (string, error) {
	f.mu.Lock()
	model := f.model
	f.mu.Unlock()
	if model != "" {
		return model, nil
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := f.call(ctx, http.MethodGet, "v1/models", nil, &list); err != nil {
		return "", err
	}
	if len(list.Data) == 0 || list.Data[0].ID == "" {
		return "", fmt.Errorf("%s lists no model", f.opts.URL.JoinPath("v1/models").Redacted())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.model = list.Data[0].ID
	return f.model, nil
}

const (
	// answerMax is the largest response of the remote engines, and errorMax the largest part of an
	// error that is logged, in bytes.
	answerMax = 4 << 20
	errorMax  = 1 << 10
)

// call sends a request to the URL and decodes the response into out, unless out is nil.
func (f *Offload) call(ctx context.Context, method, path string, body []byte, out any) (err error) {
	req, err := http.NewRequestWithContext(ctx, method, f.opts.URL.JoinPath(path).String(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if f.opts.TokenSource != nil {
		req.Header.Set("Authorization", "Bearer "+f.opts.TokenSource())
	}
	resp, err := f.opts.Client.Do(req)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, errorMax))
		return fmt.Errorf("%s %s: %s: %s", method, req.URL.Redacted(), resp.Status, bytes.TrimSpace(text))
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerMax))
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("%s %s: %w", method, req.URL.Redacted(), err)
	}
	return nil
}
