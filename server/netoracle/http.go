package netoracle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

// getJSON gets a URL and decodes the answer into into. tokenFile, unless empty, is the path of the
// file with the bearer token. The file is read for each request, because the token may have been
// replaced.
func getJSON(ctx context.Context, client *http.Client, url, accept, tokenFile string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", accept)
	if tokenFile != "" {
		token, err := os.ReadFile(tokenFile)
		if err != nil {
			return fmt.Errorf("bearer token: %w", err)
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes+1))
	if err != nil {
		return fmt.Errorf("GET %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %s", url, resp.Status, excerpt(body))
	}
	if len(body) > maxAnswerBytes {
		return fmt.Errorf("GET %s: an answer of more than %d bytes", url, maxAnswerBytes)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("GET %s: %w; the answer begins %q", url, err, excerpt(body))
	}
	return nil
}

// excerpt returns the beginning of an answer, for an error.
func excerpt(b []byte) string {
	const most = 200
	s := strings.TrimSpace(string(b[:min(len(b), most)]))
	if len(b) > most {
		s += "…"
	}
	return s
}

// errNoURL is the error of an HTTP source for which no URL was configured.
var errNoURL = errors.New("netoracle: no URL")
